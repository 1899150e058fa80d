"""Signatures of FlashInfer's entry points.

`static` reads them from source, `live` asks an imported FlashInfer, `recorded` has those of every release, and `cache`
reads the installed source once.
"""
