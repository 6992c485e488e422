"""Train the models behind embedding rewards, by contrast, distillation or regression."""
