"""What records bring about later: delays, retries. Each is a derived write."""
