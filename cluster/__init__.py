"""The application: configuration, HTTP ingress and metrics of a Quire cluster."""
