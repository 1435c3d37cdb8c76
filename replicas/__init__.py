"""A replica: one engine on one device, its Serve deployment, and the protocol others speak to it."""
