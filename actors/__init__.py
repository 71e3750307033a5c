"""The actors of the family, and the processes that host them."""
