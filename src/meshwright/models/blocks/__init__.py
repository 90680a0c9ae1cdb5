"""Building blocks of model families: norms, rotary embedding, attention
over `context`, experts, dropout."""
