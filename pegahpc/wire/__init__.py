"""The border between gateway and engines: messages, keys and sockets."""
