"""The model: where it comes from, its loading, one forward step over paged KV. Importing this is free."""
