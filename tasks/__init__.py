"""How a line of a flow becomes a request and a receipt. Every task is PURE or STATE_CHANGING (`durability.py`)."""
