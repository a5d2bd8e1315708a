"""Drafts: tokens, trees and batches that proposers make."""
