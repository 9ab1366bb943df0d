"""A budget that stops training at the data holder, whatever the server asks for."""

from securevfl import Plan, VerticalData, train

data = VerticalData.load("breast-cancer", parties=2)
plan = Plan(algorithm="vafl", epochs=100, sigma=20.0, budget_epsilon=20.0)
run = train(data, plan)
print("stopped by", run.stopped)
epsilon = run.privacy["p1"]["epsilon"]
print(f"after {run.result['epochs']} epochs: epsilon {epsilon:.2f}, AUC {run.test['auc']:.3f}")
