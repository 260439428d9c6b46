"""Other libraries' models with the patch embedding of this one. Each module imports its library when it is used."""
