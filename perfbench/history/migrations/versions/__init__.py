"""The revisions; each is what it was when it was published and imports nothing of perfbench."""
