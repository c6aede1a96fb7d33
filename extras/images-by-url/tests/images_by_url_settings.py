"""Rows of this extra in the tables of settings (`of_extras`)."""

DOCUMENTED = {
    "SIE_IMAGE_URL_HOSTS": ("(unset)", "a.example.com,*.example.org:8443,*", (",", "http://a", "a/b", "a:port"))
}
EFFECTS = {
    "SIE_IMAGE_URL_HOSTS": (
        "extras/images-by-url/tests/unit/test_image_urls.py::test_a_url_of_a_listed_host_is_its_file_on_every_route"
    )
}
