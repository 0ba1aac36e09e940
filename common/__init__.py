"""Process groups, RPC, timing and tables for programs that torchrun starts."""
