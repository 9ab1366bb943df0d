"""The trusted core: what may leave an organisation, and what is written down about it."""
