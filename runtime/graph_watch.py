"""Who wants to know of the graphs with an exchange of ours that a call of the model runs."""

from __future__ import annotations

from collections.abc import Callable

# Called before each such graph. `alone`: it is known that the graph is all that the call does, and that nothing in it
# but the launches of planned rows needs other ranks.
watch: Callable[[bool], None] | None = None
