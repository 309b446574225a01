package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// A chart is a directory of deploy/charts, and what packing adds to it: the objects of kustomizations, which its templates adapt.
type chart struct {
	name  string
	files []document
}

// chartDir has the charts, and templates that all of them have.
const (
	chartDir  = "/deploy/charts"
	commonTpl = "common/_objects.tpl"
)

var charts = []chart{
	{name: "hostpath-csi-driver", files: []document{
		// With every component: the templates leave out what the values do not want.
		{name: "driver.yaml", resources: []string{"csi/openshift"}, components: []string{"csi/snapshots", "csi/freeze"}},
		{name: "monitoring.yaml", resources: []string{"monitoring"}},
	}},
	{name: "hostpath-provisioner-operator", files: []document{{name: "operator.yaml", resources: []string{"operator"}}}},
}

// writeCharts packs the charts as helm package does (https://helm.sh/docs/topics/charts).
func (r release) writeCharts() error {
	files, err := manifests(filepath.Join(r.root, "deploy"), r.repository)
	if err != nil {
		return err
	}
	for _, c := range charts {
		content, err := r.chartFiles(files, c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		name := fmt.Sprintf("%s-%s.tgz", c.name, r.chartVersion())
		if err := r.writeTo(name, func(w io.Writer) error { return r.packed(w, content) }); err != nil {
			return err
		}
	}
	return nil
}

// chartVersion is the version without the v, which Helm's repositories do not have.
func (r release) chartVersion() string { return strings.TrimPrefix(r.version, "v") }

// chartFiles are the files of a chart.
func (r release) chartFiles(files filesys.FileSystem, c chart) (content []file, err error) {
	dir := path.Join(chartDir, c.name)
	err = files.Walk(dir, func(name string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		text, err := files.ReadFile(name)
		if err != nil {
			return err
		}
		if path.Base(name) == "Chart.yaml" {
			text = bytes.Replace(text, []byte("\nversion: 0.0.0\nappVersion: v0.0.0\n"), fmt.Appendf(nil, "\nversion: %s\nappVersion: %s\n", r.chartVersion(), r.version), 1)
		}
		content = append(content, r.chartFile(c, strings.TrimPrefix(name, dir), text))
		return nil
	})
	if err != nil {
		return nil, err
	}
	common, err := files.ReadFile(path.Join(chartDir, commonTpl))
	if err != nil {
		return nil, err
	}
	content = append(content, r.chartFile(c, "templates/"+path.Base(commonTpl), common))
	for _, d := range c.files {
		text, err := r.render(files, d)
		if err != nil {
			return nil, err
		}
		content = append(content, r.chartFile(c, "files/"+d.name, text))
	}
	return content, nil
}

func (r release) chartFile(c chart, name string, text []byte) file {
	return file{name: path.Join(c.name, name), mode: 0o644, data: text}
}
