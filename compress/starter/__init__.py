"""What `compress init` writes: a recipe that fits a model, and the CI job that runs it."""
