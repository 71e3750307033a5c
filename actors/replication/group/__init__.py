"""A replica of a group that elects its master: its process, driver, term and promises."""
