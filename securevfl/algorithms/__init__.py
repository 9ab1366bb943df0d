"""The training algorithms, written once as asynchronous roles."""
