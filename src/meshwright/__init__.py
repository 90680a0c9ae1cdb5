"""Train very large transformers on any mesh of devices."""
