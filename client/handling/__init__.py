"""Handlers: messages go to functions of the user, which say by returning or raising what became of them."""
