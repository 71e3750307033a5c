"""What travels: commands, answers, errors and names. Knows nothing of the rest."""
