"""The wire protocol: frames, messages, the handshake, and TLS."""
