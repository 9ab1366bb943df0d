"""The canary audit: how well two worlds can be told apart, set beside the promise."""
