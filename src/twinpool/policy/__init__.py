"""The policies: plain functions of what the controller shows them, each answer with its reason.

`admission` lets in or refuses, `routing` chooses the way, `estimates` guesses what no engine has told yet.
"""
