{{/*
What both charts do with the objects of their kustomization, which packing puts into files/. A chart adds no object of
its own to them and writes none twice: it leaves out what an option does not want, and sets what the values name.
*/}}

{{/*
objects are the objects of a file, as a list under the key "objects", in the namespace of the release. Before Kubernetes 1.30 there are no
policies (docs/security.md).
*/}}
{{- define "common.objects" -}}
{{- $root := .root -}}
{{- $objects := list -}}
{{- range $text := regexSplit "(?m)^---\n" ($root.Files.Get .file) -1 -}}
  {{- $text = regexReplaceAll "(?m)^( *(?:- )?namespace): hostpath-provisioner$" $text (printf "${1}: %s" $root.Release.Namespace) -}}
  {{- with $root.Values.kubeletDirectory -}}{{- $text = replace "/var/lib/kubelet" . $text -}}{{- end -}}
  {{- with fromYaml $text -}}
    {{- if or (not (hasPrefix "ValidatingAdmissionPolicy" .kind)) (semverCompare ">=1.30.0-0" $root.Capabilities.KubeVersion.Version) -}}{{- $objects = append $objects . -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml (dict "objects" $objects) -}}
{{- end -}}

{{/* labelled is an object with the labels of the release. */}}
{{- define "common.labelled" -}}
{{- $labels := dict "app.kubernetes.io/instance" .root.Release.Name "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- $_ := set .object.metadata "labels" (merge (default (dict) .object.metadata.labels) $labels (default (dict) .labels)) -}}
{{ toYaml .object }}
{{- end -}}

{{/* image is the reference of a container: the one that the values name, or that of the release, from a mirror if there is one. */}}
{{- define "common.image" -}}
{{- if hasKey .root.Values.images .name -}}
{{- get .root.Values.images .name -}}
{{- else if .root.Values.imageRegistry -}}
{{- printf "%s/%s" (trimSuffix "/" .root.Values.imageRegistry) (base .image) -}}
{{- else -}}
{{- .image -}}
{{- end -}}
{{- end -}}

{{/* pod sets in the pod of a DaemonSet or Deployment what the values name. */}}
{{- define "common.pod" -}}
{{- $root := .root -}}
{{- $template := .object.spec.template -}}
{{- $spec := $template.spec -}}
{{- range $c := $spec.containers -}}
  {{- $_ := set $c "image" (include "common.image" (dict "root" $root "name" $c.name "image" $c.image)) -}}
  {{- with $root.Values.imagePullPolicy -}}{{- $_ := set $c "imagePullPolicy" . -}}{{- end -}}
  {{- with get $root.Values.resources $c.name -}}{{- $_ := set $c "resources" . -}}{{- end -}}
  {{- $args := list -}}
  {{- range $arg := $c.args -}}{{- $args = append $args (regexReplaceAll "^--v=[0-9]+$" $arg (printf "--v=%d" (int $root.Values.logLevel))) -}}{{- end -}}
  {{- $_ := set $c "args" $args -}}
{{- end -}}
{{- range $key := list "imagePullSecrets" "tolerations" "nodeSelector" "affinity" "priorityClassName" -}}
  {{- with get $root.Values $key -}}{{- $_ := set $spec $key . -}}{{- end -}}
{{- end -}}
{{- with $root.Values.podAnnotations -}}{{- $_ := set $template.metadata "annotations" (merge (dict) . (default (dict) $template.metadata.annotations)) -}}{{- end -}}
{{- with $root.Values.podLabels -}}{{- $_ := set $template.metadata "labels" (merge (dict) $template.metadata.labels .) -}}{{- end -}}
{{- end -}}

{{/* test is what helm test does: it makes a volume of a class, and writes to it, by the driver's image. */}}
{{- define "common.test" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .root.Release.Name }}-test
  namespace: {{ .root.Release.Namespace }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-weight: "-1"
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  storageClassName: {{ .class }}
  accessModes: [ReadWriteOnce]
  resources:
    requests:
      storage: 16Mi
---
apiVersion: v1
kind: Pod
metadata:
  name: {{ .root.Release.Name }}-test
  namespace: {{ .root.Release.Namespace }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  securityContext:
    runAsNonRoot: true
    runAsUser: 65534
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  containers:
  - name: test
    image: {{ .image }}
    {{- with .root.Values.imagePullPolicy }}
    imagePullPolicy: {{ . }}
    {{- end }}
    args: [try, /data]
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
    volumeMounts:
    - name: data
      mountPath: /data
  volumes:
  - name: data
    persistentVolumeClaim:
      claimName: {{ .root.Release.Name }}-test
{{- end -}}
