"""What a record of training shows: text, pages, traces. Needs nothing but Python."""
