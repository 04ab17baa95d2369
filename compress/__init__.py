"""compress: make a Hugging Face model smaller, prove that it still works, and gate it in CI."""

__version__ = "0.1.0"
