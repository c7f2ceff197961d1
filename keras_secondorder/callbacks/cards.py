"""What the numbers of the curvature monitor mean: the texts of its cards."""

STEP = {
    "damping": "lambda, what is added to the curvature; for KFAC() a share of each "
    "block's mean eigenvalue. Falling: the model is trusted "
    "more. At its minimum for long: fine. Rising steadily: steps are too long.",
    "gamma": "Factored damping, what is added to A and G before pi shares it out.",
    "learning_rate": "As used: a step inside the trust region is shorter than asked.",
    "momentum": "mu, as used.",
    "rho": "Actual over predicted change of the loss. Near 1: the quadratic model is "
    "right. Below 1/4: it promises too much, and lambda rises. Above 1: it is careful.",
    "predicted_change": "Change of the loss by the damped quadratic model.",
    "actual_change": "Change of the loss on the same batch.",
    "quadratic_form": "delta^T C delta with the curvature C, without damping. Where C "
    "is the Fisher matrix: twice the Kullback-Leibler divergence by which the step "
    "moved the predictions.",
    "update_norm": "Length of the update.",
    "gradient_norm": "Length of the gradient of the batch.",
    "update_gradient_cosine": "-1: straight down the gradient. Near 0: curvature (or "
    "momentum) turned the step. Above 0: momentum carries it uphill.",
    "successive_cosine": "Of this update and the one before. Near 1: a steady valley. "
    "Below 0: steps jump from wall to wall; shorten them.",
    "skipped_steps": "Steps that were not taken because something was not finite.",
    "skipped_for_loss": "Skipped because the loss was not finite.",
    "skipped_for_gradient": "Skipped because the gradient was not finite.",
    "skipped_for_step": "Skipped because the step was not finite.",
    "skipped_for_empty_batch": "Skipped because the batch had no examples.",
    "failed_inverses": "Blocks that kept an old inverse because the new one failed.",
    "step_length": "What the line search left of the step; 0 where nothing helped.",
    "cg_iterations": "Iterations of conjugate gradients.",
    "cg_iterate": "The iterate that was kept.",
    "cg_residual": "Residual of the solve over the length of the gradient.",
    "cg_status": "Why the solver stopped: `kso.solvers.describe` puts it in words.",
    "solver_iterations": "Iterations of the solver.",
    "solver_residual": "Residual of the solve over the length of the gradient.",
    "solver_status": "Why the solver stopped: `kso.solvers.describe` puts it in words.",
    "basis": "Vectors of the Krylov subspace that were used (`KrylovSubspaceDescent`).",
    "bfgs_iterations": "Iterations of BFGS in the subspace.",
    "bfgs_evaluations": "Losses and gradients that BFGS computed.",
    "bfgs_status": "Why BFGS stopped: `kso.solvers.describe` puts it in words.",
    "trials": "Steps that were tried, each with more damping than the one before "
    "(`Newton`, `LevenbergMarquardt`).",
    "largest_curvature": "Largest entry of the diagonal (`DiagonalGaussNewton`).",
    "mean_curvature": "Mean entry of the diagonal.",
    "epsilon": "The step of the iteration for the velocity (`MatrixMomentum`).",
    "velocity": "Length of the velocity.",
    "mean_scaling": "Mean of the diagonal scaling (`SGDQN`).",
    "largest_rate": "Largest rate of a parameter (`StochasticMetaDescent`).",
    "mean_rate": "Mean of the rates of all parameters.",
    "seconds": "Median time of a step.",
}
TIME_SHARE = "Share of the time of all steps, by least squares over steps that have it."
MONITOR_SHARE = (
    "Time of this monitor for each second of training, above 1 where it takes longer."
)

FACTOR = {
    "condition": "Largest over smallest eigenvalue of the damped factor. Growing: "
    "directions get lost in float32; raise the damping. Not with exact damping, which "
    "is that of the product of A and G.",
    "trace": "Sum of the eigenvalues.",
    "effective_rank": "How many eigenvalues carry the trace.",
    "largest": "Largest eigenvalue.",
    "smallest": "Smallest eigenvalue, without damping.",
    "damping_share": "The damping's share of the trace. Near 1: this layer takes plain "
    "gradient steps. Near 0: the curvature decides. Not with exact damping.",
    "spectrum": "log10 of the eigenvalues; those below 1e-12 of the largest left out.",
}
LAYER = {
    "pi": "How the damping is shared: pi gamma to A, gamma / pi to G. Of layers with "
    "one A and one G.",
    "gain": "Length of the preconditioned gradient over that of the gradient. It is "
    "measured with the noise of Network, on its data.",
    "factors": "A, G and their damped inverses, absolute values, three decades.",
}
NETWORK = {
    "hessian_eigenvalue": "Largest in magnitude. Negative ones: not convex here.",
    "hessian_trace": "Sum of all eigenvalues of the Hessian, an estimate.",
    "gradient_in_top_subspace": "Share of the squared gradient in the space of the "
    "Hessian's top eigenvectors. Near 1: steps bounce between steep walls.",
    "gauss_newton_eigenvalue": "Largest eigenvalues of the Gauss-Newton matrix.",
    "gauss_newton_trace": "Sum of all eigenvalues, an estimate.",
    "gradient_square": "Squared length of the mean gradient, noise taken out. "
    "Negative: it is lost in the noise.",
    "gradient_variance": "Total variance of the gradient of one example, an estimate "
    "from the gradients of eight parts of the batch.",
    "noise_scale": "`gradient_variance` over `gradient_square`: the batch size at "
    "which noise and signal weigh alike. Left out where the gradient is lost in noise.",
    "kronecker_error": "v^T F_kron v over v^T F v, less 1. 0: exact. -0.5: the "
    "approximation sees half of the curvature, and steps along v are too long. In "
    "training mode.",
    "density": "Density of the eigenvalues of the Hessian, by Lanczos quadrature.",
}

TITLES = {
    "Step": "What the optimizer did in one step. Values that it measures every few "
    "steps (`rho`, the two changes of the loss, `quadratic_form`) stay in between.",
    "Layers": "The Kronecker factors `A` (of the inputs) and `G` (of the gradients) of "
    "each layer, as the optimizer keeps them.",
    "Network": "The curvature of the whole network at the present weights, on one "
    "fixed batch, with layers in evaluation mode unless `training=True`.",
}


def card(group: str) -> str:
    """How to read a group, in Markdown.

    Args:
        group: A key of `TITLES`.
    """
    if group == "Step":
        entries = {
            **STEP,
            "time_share/...": TIME_SHARE,
            "time_share/monitor": MONITOR_SHARE,
        }
    elif group == "Layers":
        entries = {**FACTOR, **LAYER}
    else:
        entries = NETWORK
    lines = [f"- **{name}**: {text}" for name, text in entries.items()]
    return "\n".join([TITLES[group], "", *lines])


def describe(tag: str) -> str:
    """The description of a tag, empty for one that is not known."""
    group, *_, name = tag.split("/")
    if group == "Step":
        if "/time_share/" in tag:
            return MONITOR_SHARE if name == "monitor" else TIME_SHARE
        return STEP.get(name, "")
    known = {**FACTOR, **LAYER} if group == "Layers" else NETWORK
    if name in known:
        return known[name]
    # A_condition, F_trace, G_0_largest; hessian_eigenvalue_1, kronecker_error_update
    matching = [k for k in known if name.endswith(f"_{k}") or name.startswith(f"{k}_")]
    return known[matching[0]] if matching else ""
