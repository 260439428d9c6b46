"""Plans of the patch embed: what a legal launch is on each architecture, and which one a problem gets."""
