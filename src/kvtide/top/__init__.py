"""The live view of `kvtide top`: frames of text, and keys that change something."""
