"""What a run would find on this machine, and what went wrong in one."""

from perfbench.machine.doctor.diagnose_here import diagnose
from perfbench.machine.doctor.findings import exit_code, render_text
from perfbench.machine.doctor.log import lines as log_lines
