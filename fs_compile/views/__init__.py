"""Views of a training record: text, HTML pages, traces. Pure Python, without torch."""
