"""From a recipe to a report: the only place that knows the order of the steps."""
