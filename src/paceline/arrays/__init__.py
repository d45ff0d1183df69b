"""Training with arrays of any library: JAX, Keras, TensorFlow, MLX, numpy. A worker needs no torch.

    import paceline.arrays as arrays

    with arrays.join(params, "sgd:lr=0.1,momentum=0.9") as session:
        for x, y in session.batches((images, labels), batch_size=32, epochs=5):
            loss, gradients = value_and_grad(session.params, x, y)
            session.step(gradients, loss)

The weights are a tree of arrays: dicts, lists and tuples in each other, with arrays as leaves. The script computes
gradients, a tree of the same structure. The server makes the optimizer's steps.
"""

from paceline.arrays.session import ArraySession, join

__all__ = ["ArraySession", "join"]
