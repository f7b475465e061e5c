"""Engines that move tensors between ranks: one small contract (`base.Engine`), one file per engine."""
