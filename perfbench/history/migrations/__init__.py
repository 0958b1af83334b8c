"""How the tables of a history became what they are: one revision a file, the oldest first."""
