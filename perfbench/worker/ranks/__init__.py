"""A cell on several ranks: their launcher, their common clock, and what is proved of their step."""
