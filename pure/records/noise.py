"""What noise is for. A number is a function of seed, stream, output index and purpose, so no two uses share one."""

DRAW, ACCEPT, RECOVER, PROPOSE = range(4)
"""The token at an output index where no draft stood in its way; whether its draft stands; the token in the place of a
draft that fell; a drafter's own draw."""
