"""The reports' pages in a real browser: charts drawn, nothing asked of any network."""
