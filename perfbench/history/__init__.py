"""What was measured over months: a database of judged runs, what changed in it, and its page."""
