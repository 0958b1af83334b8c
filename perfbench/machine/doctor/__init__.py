"""What a run would find on this machine, and what went wrong in one."""
