"""Training of TinyLM and its dense twin: ``python -m nsa.train``."""
