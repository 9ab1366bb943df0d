"""Training across organisations: certificates, transport, and the processes that each organisation runs."""
