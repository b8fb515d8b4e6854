"""Plans of decode attention: which task reads which entries for which rows."""
