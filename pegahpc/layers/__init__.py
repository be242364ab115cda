"""What is neither latent attention nor MoE: norms, rope tables, linears, the dense FFN."""
