def write_report(results, bundle):
    pass
