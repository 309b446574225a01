{{/*
uninstall is what helm uninstall runs before it removes anything: in a pod like the operator's its program has the operator remove what only
that can remove, and fails if something is in use. It has neither the labels of the operator's pods nor their probes.
*/}}
{{- define "operator.uninstall" -}}
{{- $name := printf "%s-uninstall" .deployment.metadata.name -}}
{{- $pod := deepCopy .deployment.spec.template -}}
{{- $labels := omit $pod.metadata.labels "name" -}}
{{- $_ := set $pod.metadata "labels" (merge (dict "app.kubernetes.io/name" $name) $labels) -}}
{{- $_ := set $pod.spec "restartPolicy" "Never" -}}
{{- $container := omit (first $pod.spec.containers) "livenessProbe" "readinessProbe" "ports" -}}
{{- $_ := set $container "args" (list "uninstall") -}}
{{- $_ := set $pod.spec "containers" (list $container) -}}
{{- $annotations := dict "helm.sh/hook" "pre-delete" "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" "helm.sh/hook-output-log-policy" "hook-failed" }}
---
{{ include "common.labelled" (dict "root" .root "object" (dict
  "apiVersion" "batch/v1" "kind" "Job"
  "metadata" (dict "name" $name "namespace" .deployment.metadata.namespace "annotations" $annotations)
  "spec" (dict "backoffLimit" 0 "ttlSecondsAfterFinished" 3600 "template" $pod))) }}
{{- end -}}
