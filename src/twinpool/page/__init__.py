"""Reports as a web page: one file, drawn with Chart.js (in the package, `chartjs/`, MIT); it asks no network for anything."""
