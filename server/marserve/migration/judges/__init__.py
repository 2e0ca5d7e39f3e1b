"""Each file judges one kind of piece of an installation, and runs nothing of it.

archive_findings     an archive
source_findings      a source file of an archive
imports              what a handler imports, and whether that exists here
settings_findings    a `config.properties`
snapshot_findings    snapshots
script_findings      shell scripts, Dockerfiles, units
deployment_findings  compose, Kubernetes, KServe
package_findings     lists of packages
workflow_findings    a workflow's archive
"""
