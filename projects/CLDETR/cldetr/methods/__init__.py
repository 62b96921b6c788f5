"""What a method does with the old model: pseudo-labels, distillation losses, the learner."""
