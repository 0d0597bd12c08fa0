"""The `trimtab` command."""
