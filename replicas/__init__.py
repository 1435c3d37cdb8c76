"""A replica: one engine on one device, its Serve deployment, and the protocol it speaks."""
