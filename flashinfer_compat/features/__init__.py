"""What FlashInfer can do, as tables: one row a feature, one row a known issue."""
